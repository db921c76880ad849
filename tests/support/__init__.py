HANG_S = 600.0
"""What has not come by then hangs: on a busy machine everything takes ten times as long. No test waits for seconds to
pass, all wait for events."""
