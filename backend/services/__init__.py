"""Thin gRPC servicers: parse, call, map."""
