"""What a terminal shows. ``views`` and its parts are pure: JSON values, width and height in, rich renderables out; ``live`` has the only
``rich.Live``, ``footer`` the launcher's one live line. May not know: stores, click."""
