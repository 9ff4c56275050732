"""Before the engines start: checks of flags, the description of the deployment, the run
directory.
"""
