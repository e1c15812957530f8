"""What a run leaves behind and shows: metrics of each turn in; files, figures, alarms and logs out."""
