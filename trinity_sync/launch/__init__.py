"""From the command line to a finished run: Hydra's application, the cluster, the actors and the job."""
