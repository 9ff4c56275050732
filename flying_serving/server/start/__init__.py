"""Before the engines start: flags are checked, the deployment is described, the run directory is
made.
"""
