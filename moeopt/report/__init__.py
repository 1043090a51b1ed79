"""Reports of results: an HTML page, the dashboard, the status of a database."""
