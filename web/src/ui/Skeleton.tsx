import styles from "./Skeleton.module.css";

/** Grey bars in the place of what is being fetched: a whole view with its heading, or the rows of a list (`bare`). */
export function Skeleton({ bare = false }: { bare?: boolean }) {
  return (
    <div className={`${styles.skeleton} ${bare ? styles.bare : ""}`} role="status" aria-busy="true">
      <span />
      <span />
      <span />
      <p className="hidden-text">Loading</p>
    </div>
  );
}
