"""`python -m ronde.launch.agent`: the agent of a host, started over ssh."""

import sys

from ronde.launch.agent.agent import main

if __name__ == "__main__":
    main()
    sys.exit(0)
