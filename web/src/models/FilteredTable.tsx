import { useId, useState } from "react";
import styles from "./FilteredTable.module.css";

const MOST_ROWS = 400;

interface Props {
  title: string;
  columns: readonly string[];
  /** Texts, one for each column; the first is unique. */
  rows: readonly (readonly string[])[];
}

/** A table of texts with a field that filters it. Shows at most 400 rows and says so. */
export function FilteredTable({ title, columns, rows }: Props) {
  const [words, setWords] = useState("");
  const heading = useId();
  const wanted = words.toLowerCase();
  const found = rows.filter((row) => row.some((text) => text.toLowerCase().includes(wanted)));
  return (
    <section className={styles.section} aria-labelledby={heading}>
      <div className={styles.head}>
        <h2 id={heading}>
          {title} <span className={styles.count}>{words ? `${found.length} of ${rows.length}` : rows.length}</span>
        </h2>
        <input
          type="search"
          aria-label={`Filter ${title.toLowerCase()}`}
          placeholder="Filter"
          value={words}
          onChange={(event) => setWords(event.target.value)}
        />
      </div>
      {/* biome-ignore lint/a11y/noNoninteractiveTabindex: a place that scrolls can be reached by the keyboard. */}
      <section className={styles.scroll} tabIndex={0} aria-label={title}>
        <table>
          <thead>
            <tr>
              {columns.map((column) => (
                <th key={column} scope="col">
                  {column}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {found.slice(0, MOST_ROWS).map((row) => (
              <tr key={row[0]}>
                {row.map((text, index) => (
                  <td key={columns[index]}>{text}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </section>
      {found.length > MOST_ROWS && (
        <p className={styles.count}>The first {MOST_ROWS} are shown. Filter to see others.</p>
      )}
      {rows.length > 0 && found.length === 0 && <p className={styles.count}>Nothing matches “{words}”.</p>}
    </section>
  );
}
