"""Time limits of launching that depend on each other, with the order that has to hold between them.

Whoever waits for somebody waits longer than that one may take, so that the one who knows the reason reports it. The
user decides Job.grace_s, Job.terminate_s, SshOptions.start_s and Settings.heartbeat_s; everything else is here.
"""

from __future__ import annotations

from typing import Final

# --- the end of a job --------------------------------------------------------------------------------------------

OUTPUT_DRAIN_TIMEOUT_S: Final = 0.2
"""How long an agent waits for the end of a dead rank's pipes, which a process outside of its group may hold open."""

LAST_REPORT_DELAY_S: Final = 0.5
"""How long an agent that cannot read its orders takes to send that as its last report."""

INTERRUPT_TIMEOUT_S: Final = 3.0
"""After Ctrl-C, the time between SIGINT and SIGTERM."""

INTERRUPTED_TERMINATE_TIMEOUT_S: Final = 2.0
"""After Ctrl-C, the most between SIGTERM and SIGKILL, whatever Job.terminate_s is: the user is waiting."""

KILL_TIMEOUT_S: Final = 5.0
"""How long the driver waits for the exits of killed ranks. They come at once, unless the kernel is busy for one."""

RANK_KILL_TIMEOUT_S: Final = 3.0
"""How long an agent that stops waits for the ranks that it has killed."""

ORPHAN_KILLER_EXIT_TIMEOUT_S: Final = 1.0
"""How long an agent that stops waits for its orphan killer, which exits within milliseconds."""

AGENT_STOP_TIMEOUT_S: Final = 5.0
"""How long the driver waits for agents to stop, at the end of the job."""

HELPER_END_TIMEOUT_S: Final = 5.0
"""After the last rank has ended, how long a scheduler and servers get to end by themselves."""

SSH_EXIT_TIMEOUT_S: Final = 5.0
"""How long the driver waits for an ssh process that it has killed."""

OUTPUT_FLUSH_TIMEOUT_S: Final = 2.0
"""How long a job that somebody stopped waits for a reader of its output that takes nothing (`| less`, Ctrl-S)."""

assert OUTPUT_DRAIN_TIMEOUT_S < KILL_TIMEOUT_S, "the driver waits until the exits of killed ranks are reported"
assert OUTPUT_DRAIN_TIMEOUT_S < LAST_REPORT_DELAY_S < AGENT_STOP_TIMEOUT_S
assert INTERRUPTED_TERMINATE_TIMEOUT_S < INTERRUPT_TIMEOUT_S < KILL_TIMEOUT_S
assert RANK_KILL_TIMEOUT_S + ORPHAN_KILLER_EXIT_TIMEOUT_S < AGENT_STOP_TIMEOUT_S, "the driver waits for its agents"

# --- a lost connection -------------------------------------------------------------------------------------------

SSH_KEEPALIVES: Final = 3
"""ssh gives a connection up after so many unanswered keepalives, which are heartbeat_s / SSH_KEEPALIVES apart."""

HEARTBEATS_BEFORE_AGENT_STOPS: Final = 6
"""An agent that gets no heartbeat for so many times heartbeat_s takes the network for cut, and stops. Generous: the
driver may only be very busy, and ranks that use ronde notice a cut themselves, and earlier."""

UNLIMITED_S: Final = 7 * 24 * 3600.0
"""For a person who debugs a rank, or has suspended the driver."""

assert HEARTBEATS_BEFORE_AGENT_STOPS > 1, "the driver's ssh notices a cut, after heartbeat_s, before the agent stops"

# --- the start of a job ------------------------------------------------------------------------------------------

RESOLVE_TIMEOUT_S: Final = 3.0
"""How long the lookup of a host's name may take; after that it is left to ssh."""

PROBE_ATTEMPT_TIMEOUT_S: Final = 2.0
"""An agent tries an address that does not answer again after so long, and can be closed in between."""

PROBE_TIMEOUT_S: Final = 5.0
"""How long an address of a host may take to answer."""

PROBE_REPLY_TIMEOUT_S: Final = 10.0
"""How long the driver waits for the agents' replies to a probe."""

PROBER_IDLE_TIMEOUT_S: Final = 30.0
"""An agent stops listening for the probes of others so long after the last request of the driver."""

SOURCE_STOP_TIMEOUT_S: Final = 5.0
"""How long the driver waits, at the end of the job, for a source of hosts that is being asked."""

assert PROBE_ATTEMPT_TIMEOUT_S < PROBE_TIMEOUT_S < PROBE_REPLY_TIMEOUT_S
assert 2 * PROBE_REPLY_TIMEOUT_S < PROBER_IDLE_TIMEOUT_S, "a probe takes two requests"

HAND_OVER_S: Final = 10.0
"""So long after the beginning of its first round a newcomer counts as one that has the state of training, or is about
to take it: another one that is told to leave then does so behind a finished step."""
