"""What client and server of the post-training service share, and the native client."""

import os
import sys

# gRPC's fork handlers, on by default, stall every channel of a process that forks (as data loaders do) while a
# call is open. Off, the parent goes on; a child must not use an inherited channel, which client/loop.py refuses.
# Read once, when grpc is first imported.
_imported_first = "grpc" in sys.modules and "GRPC_ENABLE_FORK_SUPPORT" not in os.environ
_fork_support = os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
FORK_STALLS_PARENT = _imported_first or _fork_support.lower() in ("1", "true", "yes")
