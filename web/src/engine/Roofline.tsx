import { useMutation } from "@tanstack/react-query";
import { describeError, send } from "../api/client";
import { Button } from "../ui/Button";
import { Help } from "../ui/Help";
import { Notice } from "../ui/Notice";
import styles from "./EngineView.module.css";
import { type Live, sumRecent } from "./liveState";

const OVER_S = 2;

/** What recent steps read and multiplied a second, against what this machine can do. */
export function Roofline({ live }: { live: Live }) {
  const name = live.model?.name ?? "";
  const measure = useMutation({
    mutationFn: () => send(`/v1/admin/probe?model=${encodeURIComponent(name)}`, { method: "POST" }),
  });
  const recent = sumRecent(live.history, OVER_S);
  const seconds = recent?.stepSeconds || Number.NaN;
  const rows = [
    {
      label: "Memory read",
      unit: "GB/s",
      rate: (recent?.readBytes ?? 0) / seconds / 1e9,
      limit: live.limits && live.limits.read_bytes_per_s / 1e9,
    },
    {
      label: "Multiply-adds",
      unit: "GMAC/s",
      rate: (recent?.macs ?? 0) / seconds / 1e9,
      limit: live.limits && live.limits.int8_macs_per_s / 1e9,
    },
  ];
  return (
    <section className={styles.panel} aria-label="Roofline">
      <div className={styles.panelHead}>
        <h2>
          Against the machine&apos;s limits{" "}
          <Help about="the machine's limits">
            Writing an answer means to read the whole model for each token, so the speed of the memory bounds it;
            reading questions is bound by how fast the machine multiplies. Near 100 % it cannot go faster.
          </Help>
        </h2>
        {live.limits && (
          <Button small kind="quiet" onClick={() => measure.mutate()} disabled={measure.isPending}>
            Measure again
          </Button>
        )}
      </div>
      {rows.map(({ label, unit, rate, limit }) => {
        const share = limit && Number.isFinite(rate) ? Math.min(rate / limit, 1) : 0;
        return (
          <div key={label} className={styles.limit}>
            <span>{label}</span>
            <meter className={styles.meter} min={0} max={1} value={share} aria-label={label} />
            <span className={styles.figures}>
              {Number.isFinite(rate) ? rate.toFixed(1) : "–"}
              {limit ? ` of ${limit.toFixed(1)} ${unit}, ${Math.round(100 * share)} %` : ` ${unit}`}
            </span>
          </div>
        );
      })}
      {live.limits ? (
        <p className={styles.small}>
          The last {OVER_S} seconds of steps. A step that decodes few tokens is bound by reading, one that reads prompts
          by multiplying.
        </p>
      ) : (
        <Notice
          kind="plain"
          actions={
            live.model?.device === "cpu" && (
              <Button small onClick={() => measure.mutate()} disabled={measure.isPending}>
                {measure.isPending ? "Measuring…" : "Measure now"}
              </Button>
            )
          }
        >
          {live.model?.device === "cpu" || !live.limitsHint
            ? "The limits of this machine have not been measured. That takes a second, in which answers wait."
            : live.limitsHint}
        </Notice>
      )}
      {measure.error && <Notice kind="error">{describeError(measure.error)}</Notice>}
    </section>
  );
}
