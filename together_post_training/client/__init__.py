"""The native client: connections, training sessions and samplers, all asynchronous.

Everything here runs on one background loop (`loop.background_loop()`), whichever thread or loop the caller is on.
"""
