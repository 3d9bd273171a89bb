"""Built-in models and data, and how a user's own come in: `module:function`."""
