"""What a Recording means: pure functions from Timelines to small frozen results."""
