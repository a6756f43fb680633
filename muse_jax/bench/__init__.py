"""Times of the block beside the device's floor and beside what else a user could run, all in one process and one
run.
"""
