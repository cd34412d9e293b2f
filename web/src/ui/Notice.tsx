import type { ReactNode } from "react";
import styles from "./Notice.module.css";

/** A sentence that stands out: an error with its remedy, a warning, a success. */
export function Notice({
  kind,
  children,
  actions,
}: {
  kind: "error" | "warning" | "good" | "plain";
  children: ReactNode;
  actions?: ReactNode;
}) {
  return (
    <div className={`${styles.notice} ${styles[kind]}`} role={kind === "error" ? "alert" : "status"}>
      <div className={styles.text}>{children}</div>
      {actions}
    </div>
  );
}

/** What an empty place says: what it is for, and what to do. */
export function Empty({ title, children, icon }: { title: string; children?: ReactNode; icon?: ReactNode }) {
  return (
    <div className={styles.empty}>
      {icon}
      <h2>{title}</h2>
      {children}
    </div>
  );
}
