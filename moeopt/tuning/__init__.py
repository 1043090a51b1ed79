"""The tune: its loop, options, start, finalists and outcome."""
