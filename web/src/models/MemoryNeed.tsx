import { describeError } from "../api/client";
import { useMemoryEstimate } from "../api/manage";
import { formatBytes } from "../lib/format";
import { Notice } from "../ui/Notice";
import styles from "./MemoryNeed.module.css";

/** What a model takes of the memory, drawn before it is loaded, and why it does not fit if so. */
export function MemoryNeed({ name }: { name: string }) {
  const { data, error } = useMemoryEstimate(name);
  if (error) return <Notice kind="warning">Its memory could not be estimated. {describeError(error)}</Notice>;
  if (!data) return null;
  const parts = [
    ["Weights", data.weights_bytes, styles.weights],
    ["Cache", data.is_loaded ? data.cache_in_use_bytes : data.cache_bytes, styles.cache],
  ] as const;
  const needed = parts.reduce((sum, [, bytes]) => sum + bytes, 0);
  const whole = Math.max(needed, data.free_bytes, 1);
  return (
    <section className={styles.need} aria-label="Memory">
      <h2>
        Memory{" "}
        <span>
          {formatBytes(needed)} {data.is_loaded ? "in use" : "needed"}
        </span>{" "}
        <span>{formatBytes(data.free_bytes)} free for models</span>
      </h2>
      <div className={styles.bar} aria-hidden="true">
        {parts.map(([label, bytes, part]) => (
          <span key={label} className={part} style={{ width: `${(100 * bytes) / whole}%` }} />
        ))}
      </div>
      <ul className={styles.legend}>
        {parts.map(([label, bytes, part]) => (
          <li key={label}>
            <span className={`${styles.swatch} ${part}`} aria-hidden="true" /> {label} {formatBytes(bytes)}
          </li>
        ))}
        <li>The cache may take up to {formatBytes(data.cache_max_bytes)}, as it is used</li>
      </ul>
      {data.unloads.length > 0 && (
        <Notice kind="plain">Loading it unloads {data.unloads.join(", ")} to make room.</Notice>
      )}
      {!data.fits && <Notice kind="error">{data.reason ?? "It does not fit."}</Notice>}
    </section>
  );
}
