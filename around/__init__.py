"""What stands around a run: nothing here is imported by anything but the command line."""
