"""The test kit: model ranks with the all-ranks barrier, groups made of them, and an explorer for wake rules.

====================  =============================================================================
module                what it holds
====================  =============================================================================
``rank_model``        one engine rank as a value, and a step of a whole lockstep group
``explorer``          every interleaving of the real machine with model ranks
``worlds``            the states that it visits, and the moves between them
``orbits``            which of those differ by names alone
``rules``             the wake rule, and those that do not work, by name
``drawing``           a time line of what the explorer found, as text and as SVG
``schedules``         what callers, the network and ranks do, as values and as JSON
``running``           ``run_schedule``: the real client does what a schedule says, the same each time
``strategies``        schedules for Hypothesis (needs the extra ``testing``)
``translation``       what the explorer found, as a schedule
``corpus``            the schedules that found something once
``arranging``         to cancel a task at its n-th checkpoint, and to seed Trio's order of tasks
``engine_rank``       a model rank that speaks the engine's wire
``driven``            what can be done by hand with a group of such ranks
``simulated``         a group of them in memory, behind ``memory_link``; by hand or by itself
``zmq_ranks``         the same over real ZeroMQ, in this process
``mock_ranks``        ranks as processes (``mock_process``), to be killed and frozen
``faults``            what a mock rank may be told to do wrong
``conformance``       what every wire protocol must do, for whoever adds an engine
``independent_rank``  a model of a rank that steps by itself, for engines without lockstep
``tokenspeed_rank``   one that speaks TokenSpeed's wire
====================  =============================================================================
"""
