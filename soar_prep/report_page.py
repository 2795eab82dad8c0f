def write_page(path, facts, elapsed):
    path.write_text("x")
