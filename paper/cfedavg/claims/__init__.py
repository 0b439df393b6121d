"""The claims of the paper, judged by the numbers of finished cells."""
