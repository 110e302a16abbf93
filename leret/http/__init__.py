"""The one HTTP client: policies and search engines behind a server both ask through it."""
