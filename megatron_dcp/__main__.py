"""``python -m megatron_dcp COMMAND``, the same as ``megatron-dcp COMMAND``."""

import sys

from megatron_dcp.cli import main

if __name__ == "__main__":
    sys.exit(main())
