"""What is learned: settings in; problems by index, gold step labels and text to imitate out."""
