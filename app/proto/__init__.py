"""The gRPC interface: `folio.proto`, what protoc makes of it, and the way between its messages and the HTTP bodies."""
