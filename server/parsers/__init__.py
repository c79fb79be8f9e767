"""Reading a model's answer: reasoning, tool calls and plain content, told apart while the text arrives."""
