"""One suite over all executors."""

import os

# Read by Ray when it is imported. Off, its nodes listen on 127.0.0.1 instead of the machine's address.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
