"""Tracking: an outbox that any process of a run writes into, and the process that forwards it to MLflow.

outbox.py     the queue: one SQLite file in the run's folder; neither MLflow nor a network is needed to write
forwarder.py  the only user of MLflow: opens a run there, sends what the outbox holds, ends the run
__main__.py   the process `python -m areal_core.tracking --run-dir D`
"""
