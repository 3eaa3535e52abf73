"""The local phase: model stages, pipeline, data and the inner optimizer, in one worker process per device. Imports torch."""
