import { Empty } from "../ui/Notice";

export default function CompareView(_: { detail: string }) {
  return <Empty title="Compare" />;
}
