"""The harness: engine protocol, comparison, checks, faults and the command line `dsv41`."""
