"""What is told to Prometheus, and the page where it reads it. All names are in docs/metrics.md."""

from app.serving.metrics.engine import EngineMeter, ReadyGauge, RoutingAudit, SpeculationMeter
from app.serving.metrics.page import MetricsPage
from app.serving.metrics.requests import EdgeMeter, Measured, RequestMeter

__all__ = [
    "EdgeMeter",
    "EngineMeter",
    "Measured",
    "MetricsPage",
    "ReadyGauge",
    "RequestMeter",
    "RoutingAudit",
    "SpeculationMeter",
]
