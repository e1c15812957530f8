"""What a run records and reports: takes the metrics of each turn and writes files, figures, alarms and logs."""
