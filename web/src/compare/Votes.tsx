import { formatCount } from "../lib/format";
import { useStore } from "../lib/store";
import { Button } from "../ui/Button";
import styles from "./CompareView.module.css";
import { tallies } from "./tally";

/** How often each model was the best, over all comparisons of this browser. */
export function Votes() {
  const all = useStore(tallies);
  if (all.length === 0) return null;
  return (
    <section className={styles.votes} aria-label="Votes">
      <div className={styles.sideHead}>
        <h2>Votes</h2>
        <Button small kind="quiet" onClick={() => tallies.set([])}>
          Clear the votes
        </Button>
      </div>
      <table>
        <thead>
          <tr>
            <th scope="col">Model</th>
            <th scope="col">Best</th>
            <th scope="col">Compared</th>
          </tr>
        </thead>
        <tbody>
          {all.map(({ name, best, compared }) => (
            <tr key={name}>
              <td>{name}</td>
              <td>
                {formatCount(best)} ({Math.round((100 * best) / compared)} %)
              </td>
              <td>{formatCount(compared)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}
