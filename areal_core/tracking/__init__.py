"""Tracking: an outbox that any process of a run writes into, and the process that forwards it to MLflow.

outbox.py         the queue: one SQLite file in the run's folder; neither MLflow nor a network is needed to write
mlflow_client.py  the only user of MLflow: opens and ends runs there
forwarder.py      sends what the outbox holds
pages.py          addresses of MLflow's pages, and the columns of its table of runs
timeline.py       what each process of a run did when; not sent
__main__.py       the process `python -m areal_core.tracking --run-dir D`
"""
