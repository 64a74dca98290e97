"""From files of text to batches of token ids as the student and every teacher see them."""
