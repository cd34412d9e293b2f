const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** A number of bytes as people read it: 1,536 is "1.5 KiB". */
export function formatBytes(bytes: number): string {
  if (!Number.isFinite(bytes) || bytes < 0) return "–";
  let unit = 0;
  let value = bytes;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value < 10 && unit > 0 ? value.toFixed(1) : Math.round(value).toLocaleString("en")} ${UNITS[unit]}`;
}

/** A duration: 0.4 is "400 ms", 83 is "1 min 23 s", 300 is "5 min". */
export function formatSeconds(seconds: number): string {
  if (!Number.isFinite(seconds) || seconds < 0) return "–";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const [large, small, units] =
    whole < 3600
      ? [Math.floor(whole / 60), whole % 60, ["min", "s"]]
      : [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), ["h", "min"]];
  return small ? `${large} ${units[0]} ${small} ${units[1]}` : `${large} ${units[0]}`;
}

/** A count with separators: "12,345". */
export function formatCount(value: number): string {
  return Number.isFinite(value) ? Math.round(value).toLocaleString("en") : "–";
}

/** A rate of tokens: three digits, "tokens/s". */
export function formatRate(perSecond: number): string {
  if (!Number.isFinite(perSecond) || perSecond < 0) return "–";
  return `${perSecond < 100 ? perSecond.toFixed(1) : formatCount(perSecond)} tokens/s`;
}

/** The day and minute of a time in ISO 8601: "Nov 24, 2026, 10:14 AM". */
export function formatDay(time: string): string {
  const at = new Date(time);
  return Number.isNaN(at.getTime()) ? "–" : at.toLocaleString("en", { dateStyle: "medium", timeStyle: "short" });
}
