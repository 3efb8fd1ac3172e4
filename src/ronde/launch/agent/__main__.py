"""`python -m ronde.launch.agent`: the agent of a host, started over ssh."""

from ronde.launch.agent.agent import main

if __name__ == "__main__":
    main()
