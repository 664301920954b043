"""Tracking: an outbox for metrics of all processes of a run, and a process that forwards it to MLflow.

- outbox.py: the queue, one SQLite file in the run's folder. Writing needs neither MLflow nor a network.
- mlflow_client.py: the only user of MLflow. It opens and ends runs there.
- forwarder.py: sends the contents of the outbox.
- pages.py: URLs of MLflow's pages, and the columns of its table of runs.
- timeline.py: activities of each process of a run over time; not sent.
- __main__.py: the process `python -m areal_core.tracking --run-dir D`.
"""
