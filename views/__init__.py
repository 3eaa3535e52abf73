"""The read model: what people see of a run, written once, read by the command line, the HTTP API and the tests."""
