import { formatCount } from "../lib/format";
import { Help } from "../ui/Help";
import styles from "./EngineView.module.css";
import type { KernelRow } from "./liveState";

/** The ledger: how often each kernel ran, and in which form. */
export function Kernels({ kernels }: { kernels: ReadonlyMap<string, KernelRow> }) {
  const rows = [...kernels.values()].sort(
    (a, b) => a.operator.localeCompare(b.operator) || b.count - a.count || a.variant.localeCompare(b.variant),
  );
  return (
    <section className={styles.panel} aria-label="Kernels">
      <h2>
        Kernels{" "}
        <Help about="Kernels">
          The small programs that compute a model, such as a product of matrices, with the form that was chosen for this
          machine and how often each has run.
        </Help>
      </h2>
      {rows.length === 0 ? (
        <p className={styles.small}>None has run yet.</p>
      ) : (
        // biome-ignore lint/a11y/noNoninteractiveTabindex: a place that scrolls can be reached by the keyboard.
        <section className={styles.scroll} tabIndex={0} aria-label="Table of kernels">
          <table>
            <thead>
              <tr>
                <th scope="col">Operator</th>
                <th scope="col">Runs on</th>
                <th scope="col">Variant</th>
                <th scope="col">Calls</th>
              </tr>
            </thead>
            <tbody>
              {rows.map((row) => (
                <tr key={`${row.operator} ${row.implementation} ${row.variant}`}>
                  <td>{row.operator}</td>
                  <td>{row.implementation}</td>
                  <td>{row.variant || "–"}</td>
                  <td>{formatCount(row.count)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </section>
      )}
    </section>
  );
}
