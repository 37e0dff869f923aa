"""Partition, plan, accounting and ledger, and the gate: the one exit, where noise is added."""
