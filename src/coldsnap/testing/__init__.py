"""The shipped fakes and contract suites; nothing else imports them."""
