"""The command line of a client: what is on a server, and taking checkpoints from it.

`parser.add_commands` adds the commands to a parser, `execute.execute` runs what was parsed. Commands call the server;
`records` makes of its messages what they show, `output` shows it.
"""
