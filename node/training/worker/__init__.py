"""Process of one worker: one device, one stage, one copy."""
