"""The worker plane: what runs inside a training process.

Reading order: ``api`` (what a script sees), ``runtime`` (the loop, the step, the vote), ``stayer`` and ``standby`` (the two sides of a
migration), ``board`` and ``mail`` (what the agent asked for), ``vote`` and ``ballots`` (when a step counts), ``groups``, ``build`` and
``live`` (switching communicators), ``handover``, ``transfer`` and ``state`` (what a successor receives), ``sandbox`` (rehearsing),
``bootstrap`` and ``intercept`` (how a script gets here). May not know: etcd, who decides what.
"""
