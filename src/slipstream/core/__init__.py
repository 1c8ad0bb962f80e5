"""What everything else is made of: errors, units, intervals, the Timeline and the Recording."""
