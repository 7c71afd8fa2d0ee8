"""Samples through SGLang servers, over HTTP: no SGLang is imported here, and it may live in another environment.

options.py       what the user chose
command.py       how a server is started; guard.py and process.py keep it running and never leave it behind
server.py        a server of our own or somebody's, how to reach it, and what it can do (facts.py)
client.py        its HTTP interface; requests.py and replies.py are the pure halves of it
adapters.py      which LoRA snapshots it holds
weights.py       whose turn it is to have the base weights replaced
generator.py     `backend.generator.base.Generator` over all that; sample_run.py is one sample of a call
agreement.py     whether a server computes this model as the trainer does: asked once, at the start
"""
