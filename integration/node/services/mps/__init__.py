"""The service that runs MPS control daemons for shared resources and claims."""
