"""What is installed beside our own code: the lock files in requirements/, their hashes, licences
and advisories.
"""
