"""The test kit: model ranks with the all-ranks barrier, and an explorer for wake rules.

=================  =============================================================================
module             what it holds
=================  =============================================================================
``rank_model``     one engine rank as a value, and a step of a whole lockstep group
``explorer``       every interleaving of the real machine with model ranks
=================  =============================================================================
"""
