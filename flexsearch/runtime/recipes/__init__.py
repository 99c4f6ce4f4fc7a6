"""Synchronisation recipes on ranks: the replicas of a weight come to agree by them in a plan that runs."""
