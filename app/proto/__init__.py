"""The gRPC interface: `folio.proto`, its generated code, and the conversion between messages and HTTP bodies."""
